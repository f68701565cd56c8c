"""The DFlash 2 drafter on a real checkpoint: as the package it comes from, never the worse for what happens, cheap."""
