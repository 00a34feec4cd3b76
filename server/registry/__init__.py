"""What the index keeps besides data: one module for each resource, one function for each question.

Each opens its own transaction, checks what the caller may do to the object, and returns messages.
"""
