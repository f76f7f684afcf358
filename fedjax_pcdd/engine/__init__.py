"""The engine: schedules, lanes, rounds, evaluation. It knows no method by name."""
