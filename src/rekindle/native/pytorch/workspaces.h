// What operators have in use inside themselves beside what they make, and give back. Twin of
// rekindle.pytorch.online._workspaces, where the reasons are.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "../base/types.h"
#include "device.h"
#include "signature.h"

namespace rekindle {

// What an allocator says of one call.
struct Used final {
    Bytes inside;  // the most in use while it ran, beside what is there after it
    Bytes kept;    // what is there after it beside what was there before
};

// One call that runs now, as the allocator sees it: of the device, or the one that counts.
class Watched final {
public:
    explicit Watched(const Device& device);
    Watched(const Watched&) = delete;
    Watched& operator=(const Watched&) = delete;
    Watched(Watched&&) = delete;
    Watched& operator=(Watched&&) = delete;
    ~Watched();

    // Whether there is an allocator that tells.
    static bool possible(const Device& device) noexcept;

    // It ran. Nothing: nobody can tell.
    std::optional<Used> end() const;

private:
    const Device& device_;
    bool counts_;
    Bytes before_ = 0;
    Bytes returned_ = 0;
};

// Learns them, and guesses what a signature takes of which no call was seen.
class Workspaces final {
public:
    void learn(Signature& signature, const Used& used);
    // What its first call may take; on a CPU nothing, if it is not one of those that do.
    Bytes guess(const Signature& signature, const Device& device) const;

private:
    // What is known of operators of one kind.
    struct Kind final {
        int seen = 0;  // signatures of which a call was seen
        Bytes most = 0;
        bool copies = false;  // one of them took about as much as it reads and makes
    };

    std::map<std::string, Kind, std::less<>> kinds_;
};

}  // namespace rekindle
