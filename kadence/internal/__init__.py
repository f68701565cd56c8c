"""Generated contracts between the cluster's own services; not for users."""
