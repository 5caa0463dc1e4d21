"""Text generation: from prompts to rows, tokens and texts.

The package needs torch and transformers. They are imported once a model is given.
"""
