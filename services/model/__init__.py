"""Model pieces shared by the target and the drafters."""
