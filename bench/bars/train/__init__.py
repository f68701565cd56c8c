"""The bars of the drafter that was trained here: what it and its parts bring, and that training brings something."""
