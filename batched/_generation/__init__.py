"""Text generation: prompts to rows, rows to tokens, tokens to text. Needs torch and transformers,
which are imported where a model is at hand.
"""
