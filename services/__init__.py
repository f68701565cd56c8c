"""The cluster's services and what they share."""
