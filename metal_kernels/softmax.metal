// Shared by the attention kernels: masking, the online softmax of a transposed score tile, and merging.
//
// Scores are kept in base 2 (the caller's scale includes log2(e)) and transposed: a fragment is 8 positions x 8
// queries, so a lane looks after queries fragment_col and fragment_col + 1.

constant float NO_SCORE = -1e30f;  // below any score, and finite: exp2(NO_SCORE - NO_SCORE) is 1, not NaN

// Scaled and soft-capped scores of one position for two queries; -inf where the position is not among the
// `window` positions up to the newest that the query sees.
METAL_FUNC float2 visible_score(float2 dot, float scale, float cap, int position, int2 newest, int window) {
  float2 score = dot * scale;
  if (cap > 0) {
    score = precise::tanh(score) * cap;
  }
  const bool2 seen = bool2(position <= newest.x && position > newest.x - window,
                           position <= newest.y && position > newest.y - window);
  return select(float2(-INFINITY), score, seen);
}

// Turns scores into weights against the running maximum, and rescales what was accumulated so far.
template <int POSITIONS, int CHANNELS>
METAL_FUNC void online_softmax(
    thread float2 (&scores)[POSITIONS], thread float2& best, thread float2& total, thread float2 (&acc)[CHANNELS]) {
  float2 top = best;
  UNROLL for (int i = 0; i < POSITIONS; i++) {
    top = max(top, scores[i]);
  }
  top = max_over_rows(top);
  const float2 shrink = fast::exp2(best - top);
  best = top;
  total *= shrink;
  UNROLL for (int i = 0; i < POSITIONS; i++) {
    scores[i] = fast::exp2(scores[i] - top);
    total += scores[i];
  }
  UNROLL for (int i = 0; i < CHANNELS; i++) {
    acc[i] *= shrink;
  }
}

// One softmax-weighted value, from parts that know their own maximum (in base 2) and sum. `top` is the maximum
// over all parts and the sink. A single part gives the same bits whether merged at once or by the merge kernel.
struct MergedValue {
  float top, total, value;
  void begin(float parts_top, bool has_sink, float sink) thread {
    top = has_sink ? max(parts_top, sink) : parts_top;
    total = has_sink ? fast::exp2(sink - top) : 0;
    value = 0;
  }
  void add(float part_top, float part_total, float part_value) thread {
    const float weight = fast::exp2(part_top - top);
    total = fma(part_total, weight, total);
    value = fma(part_value, weight, value);
  }
  float result() const thread {
    return total > 0 ? value / total : 0;
  }
};
