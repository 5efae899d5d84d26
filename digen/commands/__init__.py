"""Commands of the command line that have a file of their own. What is heavy is imported when they are asked for."""
