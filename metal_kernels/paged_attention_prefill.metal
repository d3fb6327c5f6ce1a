// Attention of one prefill chunk against its whole context: positions [0, flushed) in pool blocks,
// [flushed, start) in the slot's tail, [start, start + n) the chunk's own K and V. Causal; FlashAttention
// tiling with simdgroup matrices.
//
// The queries of one KV head are numbered position by position, (i, g) -> i G + g, so that a threadgroup's
// queries share K and V and see nearly the same positions. The threadgroup stages KEYS positions in
// threadgroup memory; each simdgroup runs 8 TILES queries over them, transposed as in paged_attention_decode.
//
// Template  T float16, bfloat16 or float32; BITS of pool blocks: 0 for T, or 8 or 4 (paged_kv.metal);
//           D, DV widths of K and V, multiples of 8; TILES of 8 queries a simdgroup; KEYS positions staged,
//           a multiple of 8; SIMDGROUPS per threadgroup
// Inputs    queries [Hk G, n, D] T; chunk_k [Hk, n, D], chunk_v [Hk, n, DV] T
//           pool_k, pool_v, k_scales, v_scales, tail_k, tail_v as in paged_attention_decode
//           table int32: block ids from first_block on
//           dims int32: Hk, G, n, log2 B, tail_len, slot, flushed, first_block, start, window, has_sinks,
//                       first (i, g) of this launch, first position of this launch
//           factors float: scale log2(e) and 0, or scale / softcap and softcap log2(e)
//           sink_logits [Hk G] float            (metadata is padded to 8 elements or more)
// Output    attended [Hk G, m, DV] T: the m positions that this launch covers
// Grid      (32 SIMDGROUPS query_groups, Hk, 1) threads, threadgroups of 32 SIMDGROUPS

//@body
  constexpr int PIECE = 16 / sizeof(T);
  constexpr int K_PIECES = (D + 4 * PIECE - 1) / (4 * PIECE);
  constexpr int V_PIECES = (DV + 8 * PIECE - 1) / (8 * PIECE);
  constexpr int K_ROW = D / PIECE + 1, V_ROW = DV / PIECE + 1;  // in pieces; one more, so that banks differ

  const uint lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  const int thread_index = thread_index_in_threadgroup;
  const int frow = fragment_row(lane);
  const int fcol = fragment_col(lane);

  const int kv_heads = dims[0], group = dims[1], chunk_len = dims[2], block_shift = dims[3], tail_len = dims[4];
  const int slot = dims[5], flushed = dims[6], first_block = dims[7], start = dims[8], window = dims[9];
  const bool has_sinks = dims[10];
  const int first_index = dims[11], num_positions = dims[12];  // of this launch, counted in the chunk
  const float scale = factors[0], cap = factors[1];
  const int kv_head = threadgroup_position_in_grid.y;
  const int num_queries = num_positions * group;
  const long tail_row = (long(slot) * kv_heads + kv_head) * tail_len;

  // Queries [group_query, ...) of the threadgroup, [first_query, ...) of this simdgroup, and what they see.
  const int group_query = 8 * TILES * SIMDGROUPS * int(threadgroup_position_in_grid.x);
  const int first_query = group_query + 8 * TILES * simdgroup;
  const int first_position = start + first_index;
  const int last_query = min(group_query + 8 * TILES * SIMDGROUPS, num_queries) - 1;
  const int begin = max(0, first_position + group_query / group - window + 1);
  const int end = first_position + last_query / group + 1;
  const int oldest_seen = first_position + first_query / group - window + 1;
  const int newest_seen = first_position + min(first_query + 8 * TILES - 1, num_queries - 1) / group;

  uint4 query_pieces[TILES][K_PIECES];
  int2 newest[TILES];
  float2 best[TILES], total[TILES];
  float2 acc[TILES][V_PIECES * PIECE];
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    const int query = first_query + 8 * tile + fcol;
    newest[tile] = first_position + int2(query / group, (query + 1) / group);
    best[tile] = float2(NO_SCORE);
    total[tile] = 0;
    const long row = long(kv_head * group + query % group) * chunk_len + first_index + query / group;
    const long next_row = long(kv_head * group + (query + 1) % group) * chunk_len + first_index + (query + 1) / group;
    UNROLL for (int j = 0; j < K_PIECES; j++) {
      const int channel = (4 * j + frow / 2) * PIECE + frow % 2;
      query_pieces[tile][j] = interleave(
          queries + row * D + channel, queries + next_row * D + channel, channel < D && query < num_queries,
          channel < D && query + 1 < num_queries);
    }
    UNROLL for (int i = 0; i < V_PIECES * PIECE; i++) {
      acc[tile][i] = 0;
    }
  }

  threadgroup uint4 keys[KEYS * K_ROW];
  threadgroup uint4 values[KEYS * V_ROW];
  for (int staged = begin / KEYS * KEYS; staged < end; staged += KEYS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // nobody still reads the positions staged before
    for (int at = thread_index; at < KEYS * (D + DV) / PIECE; at += 32 * SIMDGROUPS) {
      const bool is_key = at < KEYS * D / PIECE;
      const int piece = is_key ? at : at - KEYS * D / PIECE;
      const int width = is_key ? D : DV;
      const int token = piece / (width / PIECE), channel = piece % (width / PIECE) * PIECE;
      const int position = staged + token;
      uint4 bits = 0;
      if (position >= begin && position < end) {
        if (position >= start) {
          const long element = (long(kv_head) * chunk_len + position - start) * width + channel;
          bits = load_bits(is_key ? chunk_k + element : chunk_v + element);
        } else {
          const Place place = locate(
              position, flushed, table, first_block, kv_head, kv_heads, block_shift, tail_row, tail_len);
          if (is_key) {
            bits = pack(load_key<T, BITS, D>(pool_k, tail_k, k_scales, place, block_shift, 0, channel, true));
          } else {
            bits = pack(load_value<T, BITS, DV>(pool_v, tail_v, v_scales, place, 0, channel, true));
          }
        }
      }
      if (is_key) {
        keys[token * K_ROW + channel / PIECE] = bits;
      } else {
        values[token * V_ROW + channel / PIECE] = bits;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (first_query >= num_queries || staged > newest_seen || staged + KEYS <= oldest_seen) {
      continue;
    }

    float2 scores[TILES][KEYS / 8];
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      UNROLL for (int u = 0; u < KEYS / 8; u++) {
        scores[tile][u] = 0;
      }
    }
    UNROLL for (int j = 0; j < K_PIECES; j++) {
      const int piece = 4 * j + fcol / 2;
      Piece<T> query[TILES];
      UNROLL for (int tile = 0; tile < TILES; tile++) {
        query[tile].unpack(query_pieces[tile][j]);
      }
      UNROLL for (int u = 0; u < KEYS / 8; u++) {
        Piece<T> key;
        key.unpack(piece < D / PIECE ? keys[(8 * u + frow) * K_ROW + piece] : uint4(0));
        UNROLL for (int i = 0; i < PIECE / 2; i++) {
          UNROLL for (int tile = 0; tile < TILES; tile++) {
            multiply_add(scores[tile][u], key.pair[i], query[tile].pair[i]);
          }
        }
      }
    }

    UNROLL for (int tile = 0; tile < TILES; tile++) {
      UNROLL for (int u = 0; u < KEYS / 8; u++) {
        scores[tile][u] =
            visible_score(scores[tile][u], scale, cap, staged + 8 * u + frow, newest[tile], window);
      }
      online_softmax(scores[tile], best[tile], total[tile], acc[tile]);
    }

    UNROLL for (int u = 0; u < KEYS / 8; u++) {
      UNROLL for (int j = 0; j < V_PIECES; j++) {
        const int piece = 8 * j + frow;
        const int at = (8 * u + fcol) * V_ROW + piece;
        Piece<T> value, next;
        value.unpack(piece < DV / PIECE ? values[at] : uint4(0));
        next.unpack(piece < DV / PIECE ? values[at + V_ROW] : uint4(0));
        UNROLL for (int i = 0; i < PIECE; i++) {
          const float2 pair = float2(value.pair[i / 2][i % 2], next.pair[i / 2][i % 2]);
          UNROLL for (int tile = 0; tile < TILES; tile++) {
            multiply_add(acc[tile][j * PIECE + i], pair, scores[tile][u]);
          }
        }
      }
    }
  }

  UNROLL for (int tile = 0; tile < TILES; tile++) {
    total[tile] = sum_over_rows(total[tile]);
    UNROLL for (int c = 0; c < 2; c++) {
      const int query = first_query + 8 * tile + fcol + c;
      if (query >= num_queries) {
        continue;
      }
      const int head = kv_head * group + query % group;
      float weight = 1, sum = total[tile][c];
      if (has_sinks) {
        const float sink = sink_logits[head] * M_LOG2E_F, top = max(best[tile][c], sink);
        weight = fast::exp2(best[tile][c] - top);
        sum = sum * weight + fast::exp2(sink - top);
      }
      const long to = (long(head) * num_positions + query / group) * DV;
      UNROLL for (int j = 0; j < V_PIECES; j++) {
        const int channel = (8 * j + frow) * PIECE;
        UNROLL for (int i = 0; i < PIECE; i++) {
          if (channel < DV) {
            attended[to + channel + i] = T(acc[tile][j * PIECE + i][c] * weight / sum);
          }
        }
      }
    }
  }
