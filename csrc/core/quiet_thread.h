// Starting a thread that no signal interrupts.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>

namespace dure {

// Signals are for the program's own threads: a Python handler runs in the main thread.
inline std::thread start_quietly(auto body, const char* name) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread thread;
    try {
        thread = std::thread(std::move(body));
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread.native_handle(), name);
    return thread;
}

}  // namespace dure
