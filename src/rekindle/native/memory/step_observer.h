// Who follows the steps of a program, as the memory room sees it.
#pragma once

namespace rekindle {

struct Recipe;
struct Record;

// With the core's lock.
class StepObserver {
public:
    StepObserver(const StepObserver&) = delete;
    StepObserver& operator=(const StepObserver&) = delete;
    StepObserver(StepObserver&&) = delete;
    StepObserver& operator=(StepObserver&&) = delete;
    virtual ~StepObserver() = default;

    // The program ran `call`, and the engine knows of it.
    virtual void made(const Recipe& call) = 0;
    // The program asks for `record`, which is gone.
    virtual void wanting(const Record& record) = 0;

protected:
    StepObserver() = default;
};

}  // namespace rekindle
