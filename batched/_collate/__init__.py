"""Between calls and batches: slices of requests to the argument of the batch function, its output
to one result per request.
"""
