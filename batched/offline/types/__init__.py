"""Types: values of functions as plain Python, and columns of Arrow."""
