"""First light: a real model decodes through three services, exact, faster than its reference, in bounded memory."""
