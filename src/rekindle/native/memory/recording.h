// Starts the recordings from which Python builds traces.
#pragma once

#include "observers/transcript.h"
#include "session.h"

namespace rekindle {

// Start to record events into `transcript`. The recording first lists the storages that exist now.
void start_recording(Session& session, Transcript& transcript);

}  // namespace rekindle
