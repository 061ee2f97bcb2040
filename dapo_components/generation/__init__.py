"""Engines that turn prompts into responses."""
