"""Schedules as data and the runtime that executes them. Knows no model: its executor is passed in."""
