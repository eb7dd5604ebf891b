// A pending operation, as Python has it: what `Work` waits for.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "request.h"

namespace dure {

class Engine;

// An operation and what it works on; the engine knows it until it has ended. Needs the GIL.
struct PendingCall {
    std::shared_ptr<Request> request;
    const Site* site;
    nanobind::object one, other;
};

// What Python calls "Request"; the same methods as dure.comm.backends.request.Request.
class PythonRequest {
  public:
    PythonRequest(std::shared_ptr<PendingCall> call, Engine& engine);

    bool done() const { return call_->request->done() || left_behind(); }
    int source() const { return call_->request->source(); }
    // Where the program called, as "file:line in function".
    const std::string& site() const { return call_->site->text; }
    // Wait, at most `seconds` unless None; false if they passed first. Throws the operation's
    // error.
    bool wait(nanobind::handle seconds);
    // Wait on a thread whose core others of the rank may want: run nothing, and let nobody spin.
    void wait_aside();

  private:
    bool ended();
    // Whether it was pending when this process was forked from the rank's: here it never ends.
    bool left_behind() const;

    std::shared_ptr<PendingCall> call_;
    nanobind::object owner_;  // of the engine
    Engine& engine_;
};

void bind_request(nanobind::module_& m);

}  // namespace dure
