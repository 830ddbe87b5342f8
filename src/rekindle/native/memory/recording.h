// Starts the recordings from which Python builds traces.
#pragma once

#include "driver.h"
#include "observers/transcript.h"

namespace rekindle {

// Start to record events into `transcript`. The recording first lists the storages that exist now.
void start_recording(Driver& driver, Transcript& transcript);

}  // namespace rekindle
