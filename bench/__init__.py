"""Measurements of the running cluster, and the bars they are held against."""
