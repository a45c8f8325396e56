"""What Fedkin promises, seen from outside: public names and commands only."""
