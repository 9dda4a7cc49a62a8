"""Small sums and rows of numbers over ranks: gloo's own collectives against one round."""
