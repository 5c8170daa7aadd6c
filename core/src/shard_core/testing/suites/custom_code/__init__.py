"""What users' own modules and loops do beyond a loss, a backward and a step."""
