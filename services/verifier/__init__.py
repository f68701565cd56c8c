"""The target model's engine."""
