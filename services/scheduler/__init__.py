"""Gateway, admission, routing and policy; never imports torch."""
