"""Makes what drafters are trained from and served with."""
