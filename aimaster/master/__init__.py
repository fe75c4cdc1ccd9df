"""The master of a job: hears agents and controller, journals, lets the brain decide, and carries the decisions out."""
