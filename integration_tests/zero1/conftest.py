collect_ignore = ["tests"]  # run where the package is installed, by test_zero1.py
