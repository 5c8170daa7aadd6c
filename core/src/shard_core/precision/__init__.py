"""Precisions: the table of which dtype where, the parts that apply a row of it, and the gradient scaler."""
