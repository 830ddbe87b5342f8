"""What the program's own variables hold may go as well."""

from rekindle.pytorch.held._anything import Anything as Anything
from rekindle.pytorch.held._anything import Touching as Touching
from rekindle.pytorch.held._anything import anything as anything
from rekindle.pytorch.held._anything import last_resort as last_resort
from rekindle.pytorch.held._escapes import escapes_seen as escapes_seen
from rekindle.pytorch.held._husk import flag_of_reading as flag_of_reading
from rekindle.pytorch.held._husk import there_are_husks as there_are_husks
from rekindle.pytorch.held._lending import Lending as Lending
from rekindle.pytorch.held._natively import anything_natively as anything_natively
from rekindle.pytorch.held._natively import known_natively as known_natively
from rekindle.pytorch.held._threads import OURS as OURS
