#include "watcher.h"

#include <cstring>
#include <system_error>

#include "quiet_thread.h"

namespace dure {

namespace {

constexpr int64_t kForeverNs = 3600'000'000'000;

// Holds the block's `life` for the calling thread; the kernel reads the list at the thread's death.
class Robust {
  public:
    explicit Robust(RankBlock& block) : block_(block) {
        size_t bytes = 0;
        if (syscall(SYS_get_robust_list, 0, &before_, &bytes) != 0) return;
        auto* link = reinterpret_cast<robust_list*>(&block.life_link);
        head_.list.next = &head_.list;
        head_.futex_offset = static_cast<long>(offsetof(RankBlock, life)) -
                             static_cast<long>(offsetof(RankBlock, life_link));
        if (syscall(SYS_set_robust_list, &head_, sizeof head_) != 0) return;
        link->next = &head_.list;
        block.life.store(static_cast<uint32_t>(syscall(SYS_gettid)), std::memory_order_seq_cst);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        head_.list.next = link;
        held_ = true;
    }
    ~Robust() {
        if (!held_) return;
        head_.list.next = &head_.list;
        std::atomic_signal_fence(std::memory_order_seq_cst);
        block_.life.store(0, std::memory_order_seq_cst);
        syscall(SYS_set_robust_list, before_, sizeof head_);
    }
    Robust(const Robust&) = delete;
    Robust& operator=(const Robust&) = delete;

  private:
    RankBlock& block_;
    robust_list_head head_{};
    robust_list_head* before_ = nullptr;
    bool held_ = false;
};

void answer(RankBlock& block, const std::string& text, uint32_t question) {
    char bytes[kAnswerBytes] = {};
    std::memcpy(bytes, text.data(), whole_characters(text, sizeof bytes - 1));
    block.answered.store(0, std::memory_order_seq_cst);
    for (size_t i = 0; i < kAnswerBytes / 8; i++) {
        uint64_t part = 0;
        std::memcpy(&part, bytes + 8 * i, 8);
        block.answer[i].store(part, std::memory_order_seq_cst);
    }
    block.answered.store(question, std::memory_order_seq_cst);
    futex_wake_all(block.answered);
}

std::string answer_of(const RankBlock& block) {
    char bytes[kAnswerBytes];
    for (size_t i = 0; i < kAnswerBytes / 8; i++) {
        uint64_t part = block.answer[i].load(std::memory_order_seq_cst);
        std::memcpy(bytes + 8 * i, &part, 8);
    }
    return {bytes, strnlen(bytes, sizeof bytes)};
}

}  // namespace

void Watcher::start(RankBlock& block, std::shared_ptr<Mapping> mapping) {
    shared_ = std::make_shared<Shared>(block, std::move(mapping), std::move(where_));
    try {
        thread_ = start_quietly([shared = shared_] { work(*shared); }, "dure-watch");
    } catch (const std::system_error&) {
        shared_.reset();
    }
}

void Watcher::work(Shared& shared) {
    RankBlock& block = shared.block;
    Robust hold(block);
    uint32_t done = 0;
    while (!shared.stopping.load(std::memory_order_seq_cst)) {
        const uint32_t asked = block.asked.load(std::memory_order_seq_cst);
        if (asked == done) {
            futex_wait(block.asked, asked, kForeverNs);
            continue;
        }
        std::string text = shared.where ? shared.where() : std::string();
        answer(block, text, done = asked);
    }
}

void Watcher::stop() {
    if (!thread_.joinable()) return;
    shared_->stopping.store(true, std::memory_order_seq_cst);
    shared_->block.asked.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(shared_->block.asked);
    if (thread_.get_id() == std::this_thread::get_id())
        thread_.detach();
    else
        thread_.join();
    shared_.reset();
}

uint32_t ask(RankBlock& block) {
    const uint32_t question = block.asked.fetch_add(1, std::memory_order_seq_cst) + 1;
    futex_wake_all(block.asked);
    return question;
}

std::string await_answer(RankBlock& block, uint32_t question, int64_t deadline_ns) {
    for (;;) {
        const uint32_t seen = block.answered.load(std::memory_order_seq_cst);
        if (seen != 0 && static_cast<int32_t>(seen - question) >= 0) {
            std::string text = answer_of(block);
            if (block.answered.load(std::memory_order_seq_cst) == seen) return text;
            continue;
        }
        const int64_t left = deadline_ns - now_ns();
        if (left <= 0) return "";
        futex_wait(block.answered, seen, left);
    }
}

}  // namespace dure
