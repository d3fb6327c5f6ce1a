// Combines the chunks of each row that paged_attention_decode left behind, attention sinks included. Not
// launched when every row has one chunk.
//
// Template  T output type; DV value width; SIMDGROUPS per threadgroup
// Inputs    partials [W, Q, DV] float, unnormalised     stats [W, Q, 2] float: maximum (base 2) and sum
//           row_chunks [R, 2] int32: first work item and number of them; padded to 8 elements or more
//           dims int32 as in paged_attention_decode     sink_logits [Hq] float
// Output    attended [R, Q, DV] T, with Q = Hq q_len queries a row
// Grid      (32 SIMDGROUPS, Q, R) threads, threadgroups of 32 SIMDGROUPS
// A chunk whose sum is 0 was not reached: its partials are not read.

//@body
  constexpr int LANE_CHANNELS = (DV + 31) / 32;
  const int lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  const int query = threadgroup_position_in_grid.y;
  const int num_queries = threadgroups_per_grid.y;
  const int row = threadgroup_position_in_grid.z;
  const int first = row_chunks[2 * row], count = row_chunks[2 * row + 1];
  const bool has_sink = dims[8];
  const float sink = has_sink ? sink_logits[query / dims[2]] * M_LOG2E_F : 0;

  float top = NO_SCORE;
  for (int i = lane; i < count; i += 32) {
    top = max(top, stats[2 * (long(first + i) * num_queries + query)]);
  }
  top = simd_max(top);

  // Simdgroups share the chunks out; each lane owns channels lane, lane + 32, ...
  MergedValue merged[LANE_CHANNELS];
  UNROLL for (int c = 0; c < LANE_CHANNELS; c++) {
    merged[c].begin(top, has_sink, sink);
    merged[c].total = simdgroup == 0 ? merged[c].total : 0;
  }
  for (int i = simdgroup; i < count; i += SIMDGROUPS) {
    const long part = long(first + i) * num_queries + query;
    if (stats[2 * part + 1] > 0) {
      UNROLL for (int c = 0; c < LANE_CHANNELS; c++) {
        const int channel = lane + 32 * c;
        merged[c].add(stats[2 * part], stats[2 * part + 1], channel < DV ? partials[part * DV + channel] : 0);
      }
    }
  }

  threadgroup float part_total[SIMDGROUPS];
  threadgroup float part_value[SIMDGROUPS][LANE_CHANNELS * 32];
  if (lane == 0) {
    part_total[simdgroup] = merged[0].total;
  }
  UNROLL for (int c = 0; c < LANE_CHANNELS; c++) {
    part_value[simdgroup][lane + 32 * c] = merged[c].value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int channel = thread_index_in_threadgroup; channel < DV; channel += 32 * SIMDGROUPS) {
    MergedValue all;
    all.total = all.value = 0;
    for (int s = 0; s < SIMDGROUPS; s++) {
      all.total += part_total[s];
      all.value += part_value[s][channel];
    }
    attended[(long(row) * num_queries + query) * DV + channel] = T(all.result());
  }
