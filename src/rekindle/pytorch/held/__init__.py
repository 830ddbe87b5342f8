"""What the program's own variables hold may go as well."""

from rekindle.pytorch.held._husk import flag_of_reading as flag_of_reading
from rekindle.pytorch.held._husk import there_are_husks as there_are_husks
from rekindle.pytorch.held._natively import known_natively as known_natively
from rekindle.pytorch.held._natively import lending_natively as lending_natively
from rekindle.pytorch.held._threads import OURS as OURS
