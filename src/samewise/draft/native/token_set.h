// The tokens that occur in a text: a bit for each. A sequence owns that of its own text.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace samewise::drafting {

class TokenSet {
  public:
    explicit TokenSet(int64_t vocab) : words_(vocab / 64 + 1) {}

    bool has(int32_t token) const {
        const uint64_t word = static_cast<uint32_t>(token) / 64;
        return word < words_.size() && (words_[word] >> (token % 64) & 1);
    }

    // A token that is not of the vocabulary is left out.
    void add(int32_t token) {
        const uint64_t word = static_cast<uint32_t>(token) / 64;
        if (word < words_.size()) words_[word] |= 1ull << (token % 64);
    }

    size_t nbytes() const { return words_.capacity() * sizeof(uint64_t); }

  private:
    std::vector<uint64_t> words_;
};

}  // namespace samewise::drafting
