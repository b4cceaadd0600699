// The DeepSeek family in double precision as in the papers (DeepSeek-V2, arXiv 2405.04434, section
// 2; DeepSeek-V3, arXiv 2412.19437, section 2.1): no cache, no absorption, no batch, one token at a
// time. Shares only the config and weight structs with src/; decoding, YaRN and routing are its
// own.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "model/weights.h"

namespace tandem::test {

using Vec = std::vector<double>;

inline double e4m3(uint8_t code) {
  const int e = code >> 3 & 15, m = code & 7;
  const double magnitude = e == 0 ? m / 512.0 : (1 + m / 8.0) * std::pow(2.0, e - 7);
  return code & 0x80 ? -magnitude : magnitude;
}

inline double number(const TensorView& t, int64_t r, int64_t c) {
  if (t.dtype == DType::kI4Words) {  // the first number is the low half of the first byte
    const int pair = static_cast<int>(t.row_data(r)[c / 2]);
    return (c % 2 == 0 ? pair & 15 : pair >> 4) - 8;
  }
  const std::byte* at = t.row_data(r) + c * size_of(t.dtype);
  if (t.dtype == DType::kF8E4M3) return e4m3(static_cast<uint8_t>(*at));
  if (t.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  if (t.dtype == DType::kBF16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const int e = bits >> 10 & 31, m = bits & 1023;  // F16
  const double magnitude =
      e == 0 ? m * std::pow(2.0, -24) : (1 + m / 1024.0) * std::pow(2.0, e - 15);
  return bits & 0x8000 ? -magnitude : magnitude;
}

inline double value(const QuantView& w, int64_t r, int64_t c) {
  const double q = number(w.q, r, c);
  return w.scale.empty()
             ? q
             : q * number(w.scale, (w.row0 + r) / w.block_rows, (w.col0 + c) / w.block_cols);
}

inline Vec mul(const QuantView& w, const Vec& x, int64_t first_row = 0, int64_t n_rows = -1) {
  Vec y(n_rows < 0 ? w.q.rows : n_rows);
  for (size_t r = 0; r < y.size(); ++r)
    for (size_t k = 0; k < x.size(); ++k) y[r] += value(w, first_row + r, k) * x[k];
  return y;
}

inline Vec norm(const Vec& x, const QuantView& gain, double eps) {
  const double mean = std::inner_product(x.begin(), x.end(), x.begin(), 0.0) / x.size();
  Vec y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] / std::sqrt(mean + eps) * value(gain, 0, i);
  return y;
}

// Rounds to the nearest E4M3 number, with a scale for each 128 that maps the largest magnitude to
// 448.
inline Vec rounded_to_e4m3(Vec x) {
  constexpr size_t kBlock = 128;
  for (size_t first = 0; first < x.size(); first += kBlock) {
    const size_t end = std::min(x.size(), first + kBlock);
    double most = 0;
    for (size_t i = first; i < end; ++i) most = std::max(most, std::abs(x[i]));
    for (size_t i = first; i < end; ++i) {
      if (x[i] == 0) continue;
      const double v = x[i] / most * 448;  // 3 mantissa bits; subnormals are multiples of 2^-9
      const double unit = std::exp2(std::max(-9, std::ilogb(v) - 3));
      x[i] = std::nearbyint(v / unit) * unit * most / 448;
    }
  }
  return x;
}

class NaiveDeepSeek {
 public:
  // With fp8_activations the inputs of FP8 weights are rounded, except latents that are restored to
  // keys and values.
  NaiveDeepSeek(const ModelConfig& config, const ModelWeights& weights,
                bool fp8_activations = false)
      : c_(config), w_(weights), fp8_activations_(fp8_activations) {
    set_up_yarn();
  }

  // [token][vocab]
  std::vector<Vec> logits(const std::vector<int32_t>& tokens) const {
    std::vector<Vec> x;
    for (const int32_t t : tokens) {
      Vec row(c_.dim);
      for (int i = 0; i < c_.dim; ++i) row[i] = value(w_.embed, t, i);
      x.push_back(row);
    }
    for (int l = 0; l < c_.n_layers; ++l) {
      const LayerWeights& w = w_.layers[l];
      std::vector<Vec> h;
      for (const Vec& v : x) h.push_back(norm(v, w.attn_norm, c_.norm_eps));
      add(x, attention(w.attn, h));
      h.clear();
      for (const Vec& v : x)
        h.push_back(c_.is_moe(l) ? mixture(w, norm(v, w.ffn_norm, c_.norm_eps))
                                 : ffn(w.ffn, norm(v, w.ffn_norm, c_.norm_eps)));
      add(x, h);
    }
    for (Vec& v : x) v = mul(w_.head, norm(v, w_.final_norm, c_.norm_eps));
    return x;
  }

 private:
  static void add(std::vector<Vec>& x, const std::vector<Vec>& y) {
    for (size_t t = 0; t < x.size(); ++t)
      for (size_t i = 0; i < x[t].size(); ++i) x[t][i] += y[t][i];
  }

  Vec linear(const QuantView& w, const Vec& x) const {
    return mul(w, fp8_activations_ && w.q.dtype == DType::kF8E4M3 ? rounded_to_e4m3(x) : x);
  }

  Vec ffn(const FfnWeights& w, const Vec& x) const {
    Vec g = linear(w.gate, x);
    const Vec u = linear(w.up, x);
    for (size_t i = 0; i < g.size(); ++i) g[i] *= u[i] / (1 + std::exp(-g[i]));
    return linear(w.down, g);
  }

  void set_up_yarn() {
    const RopeConfig& r = c_.rope;
    const int dim = c_.mla.rope_dim;
    const auto ms = [](double f, double m) { return f <= 1 ? 1 : 0.1 * m * std::log(f) + 1; };
    for (int i = 0; i < dim / 2; ++i) frequency_.push_back(std::pow(r.theta, -2.0 * i / dim));
    scale_ = 1 / std::sqrt(double(c_.mla.nope_dim + dim));
    if (!r.yarn) return;
    const auto cdim = [&](double beta) {
      return dim * std::log(r.original_context / (2 * M_PI * beta)) / (2 * std::log(r.theta));
    };
    const double low = std::max(std::floor(cdim(r.beta_fast)), 0.0);
    double high = std::min(std::ceil(cdim(r.beta_slow)), double(dim - 1));
    if (low == high) high += 0.001;
    for (int i = 0; i < dim / 2; ++i) {
      const double ramp = std::min(1.0, std::max(0.0, (i - low) / (high - low)));
      frequency_[i] *= ramp / r.factor + (1 - ramp);
    }
    if (r.mscale_all_dim != 0)
      scale_ *= ms(r.factor, r.mscale_all_dim) * ms(r.factor, r.mscale_all_dim);
    amplitude_ = r.mscale != 0 && r.mscale_all_dim != 0
                     ? ms(r.factor, r.mscale) / ms(r.factor, r.mscale_all_dim)
                     : ms(r.factor, 1);
  }

  Vec rope(Vec v, int position) const {
    for (size_t i = 0; i < frequency_.size(); ++i) {
      const double angle = position * frequency_[i], a = v[2 * i], b = v[2 * i + 1];
      v[2 * i] = amplitude_ * (a * std::cos(angle) - b * std::sin(angle));
      v[2 * i + 1] = amplitude_ * (a * std::sin(angle) + b * std::cos(angle));
    }
    return v;
  }

  // Keys and values of every head in full; token t attends to tokens 0..t.
  std::vector<Vec> attention(const AttentionWeights& w, const std::vector<Vec>& h) const {
    const MlaConfig& m = c_.mla;
    const size_t n = h.size();
    std::vector<Vec> q(n), kv(n), k_rope(n), out(n);
    for (size_t t = 0; t < n; ++t) {
      q[t] = m.q_rank ? linear(w.q_b, norm(linear(w.q_a, h[t]), w.q_a_norm, c_.latent_norm_eps))
                      : linear(w.q, h[t]);
      const Vec a = linear(w.kv_a, h[t]);
      const Vec latent =
          norm(Vec(a.begin(), a.begin() + m.kv_rank), w.kv_a_norm, c_.latent_norm_eps);
      kv[t] = mul(w.kv_b, latent);
      k_rope[t] = rope(Vec(a.begin() + m.kv_rank, a.end()), int(t));
    }
    for (size_t t = 0; t < n; ++t) {
      Vec o(m.n_heads * m.v_dim);
      for (int head = 0; head < m.n_heads; ++head) {
        const double* q_head = &q[t][head * m.qk_dim()];
        const Vec q_rope = rope(Vec(q_head + m.nope_dim, q_head + m.qk_dim()), int(t));
        Vec p(t + 1);
        for (size_t s = 0; s <= t; ++s) {
          const double* k = &kv[s][head * (m.nope_dim + m.v_dim)];
          p[s] =
              scale_ * (std::inner_product(q_head, q_head + m.nope_dim, k, 0.0) +
                        std::inner_product(q_rope.begin(), q_rope.end(), k_rope[s].begin(), 0.0));
        }
        const double max = *std::max_element(p.begin(), p.end());
        double sum = 0;
        for (double& v : p) sum += v = std::exp(v - max);
        for (size_t s = 0; s <= t; ++s)
          for (int j = 0; j < m.v_dim; ++j)
            o[head * m.v_dim + j] +=
                p[s] / sum * kv[s][head * (m.nope_dim + m.v_dim) + m.nope_dim + j];
      }
      out[t] = linear(w.o, o);
    }
    return out;
  }

  // The grouped sigmoid router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2; Gate in
  // inference/model.py) or the softmax router of DeepSeek-V2 (arXiv 2405.04434, section 2.2;
  // MoEGate in modeling_deepseek.py).
  std::vector<std::pair<int, double>> chosen_experts(const LayerWeights& w, const Vec& h) const {
    const RouterConfig& r = c_.router;
    Vec s = mul(w.router, h);
    double sum = 0;
    const double max = *std::max_element(s.begin(), s.end());
    for (double& v : s)
      sum += v = r.scoring == Scoring::kSigmoid ? 1 / (1 + std::exp(-v)) : std::exp(v - max);
    if (r.scoring == Scoring::kSoftmax)
      for (double& v : s) v /= sum;
    Vec choice = s;
    if (r.has_bias())
      for (int e = 0; e < r.n_experts; ++e) choice[e] += value(w.router_bias, 0, e);

    const int size = r.n_experts / r.n_groups;
    std::vector<std::pair<double, int>>
        groups;  // (negated score, index): the best score first, then the lower index
    for (int g = 0; g < r.n_groups; ++g) {
      Vec members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(members.rbegin(), members.rend());
      const bool two = r.method == TopkMethod::kNoauxTc && size > 1;
      groups.push_back({-(members[0] + (two ? members[1] : 0)), g});
    }
    std::sort(groups.begin(), groups.end());
    if (r.method != TopkMethod::kGreedy) groups.resize(r.n_active_groups);
    std::vector<std::pair<double, int>> candidates;
    for (const auto& [score, g] : groups)
      for (int e = g * size; e < (g + 1) * size; ++e) candidates.push_back({-choice[e], e});
    std::sort(candidates.begin(), candidates.end());

    std::vector<std::pair<int, double>> chosen;
    double total = 0;
    for (int k = 0; k < r.n_active; ++k) total += s[candidates[k].second];
    for (int k = 0; k < r.n_active; ++k) {
      double weight = s[candidates[k].second];
      const bool renormalised = r.normalize && r.n_active > 1;
      if (renormalised) weight /= total + 1e-20;
      if (!renormalised || c_.architecture != "DeepseekV2ForCausalLM") weight *= r.scale;
      chosen.push_back({candidates[k].second, weight});
    }
    return chosen;
  }

  Vec mixture(const LayerWeights& w, const Vec& h) const {
    Vec y = c_.n_shared_experts > 0 ? ffn(w.ffn, h) : Vec(c_.dim);
    for (const auto& [e, weight] : chosen_experts(w, h)) {
      const Vec part = ffn(w.experts[e], h);
      for (int i = 0; i < c_.dim; ++i) y[i] += weight * part[i];
    }
    return y;
  }

  const ModelConfig& c_;
  const ModelWeights& w_;
  const bool fp8_activations_;
  Vec frequency_;
  double scale_ = 1, amplitude_ = 1;
};

}  // namespace tandem::test
