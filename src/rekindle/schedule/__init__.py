"""Actions and schedules, the verifier that judges them, and records of runs."""

from rekindle._public import publish
from rekindle.schedule._actions import Action as Action
from rekindle.schedule._actions import Compute as Compute
from rekindle.schedule._actions import Discard as Discard
from rekindle.schedule._actions import Free as Free
from rekindle.schedule._actions import Schedule as Schedule
from rekindle.schedule._actions import SwapIn as SwapIn
from rekindle.schedule._actions import SwapOut as SwapOut
from rekindle.schedule._record import Record as Record
from rekindle.schedule._record import Recorder as Recorder
from rekindle.schedule._timeline import Timeline as Timeline
from rekindle.schedule._verify import Cost as Cost
from rekindle.schedule._verify import verify as verify

publish(__name__, globals().values())
