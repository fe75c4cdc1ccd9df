"""Elastic training: see faults, find the culprit, re-form around it."""
