"""What a member process imports to say that it lives: standard library only, microseconds a beat, a no-op outside a run.

`start_member()` opens the progress file, registers stack dumps and arms the self-fence; the Progress it returns is beaten by the
training thread alone: `progress.beat("compute", step=12)`. `report_progress(step)` is the one line for a user's own script.
`read_progress(path)` is the other side, what the agent sees.
"""

from aimaster.client.leases import Leases
from aimaster.client.member import report_progress, start_member
from aimaster.client.progress import PHASES, Progress, ProgressReading, read_progress

__all__ = ["PHASES", "Leases", "Progress", "ProgressReading", "read_progress", "report_progress", "start_member"]
