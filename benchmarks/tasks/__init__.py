"""Real tasks away from their ceiling, made on any machine from Debian packages: letters and text."""
