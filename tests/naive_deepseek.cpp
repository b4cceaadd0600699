#include "tests/naive_deepseek.h"

#include <Eigen/Core>
#include <Eigen/Geometry>
#include <algorithm>
#include <limits>
#include <numeric>

namespace tandem::test {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Row = Eigen::RowVectorXd;

Matrix decoded(const QuantView& w) {
  return Matrix::NullaryExpr(w.q.rows, w.q.cols,
                             [&](Eigen::Index r, Eigen::Index c) { return value(w, r, c); });
}

Matrix mul(const QuantView& w, const Matrix& x) { return x * decoded(w).transpose(); }

Matrix norm(const Matrix& x, const QuantView& gain, double eps) {
  const Eigen::VectorXd mean = x.rowwise().squaredNorm() / x.cols();
  return (mean.array() + eps).rsqrt().matrix().asDiagonal() * x * decoded(gain).row(0).asDiagonal();
}

double rounded_to_e4m3(double v) {  // 3 mantissa bits; subnormals are multiples of 2^-9
  if (v == 0) return 0;
  const double unit = std::exp2(std::max(-9, std::ilogb(v) - 3));
  return std::nearbyint(v / unit) * unit;
}

Matrix rounded_to_e4m3(Matrix x) {
  constexpr Eigen::Index kBlock = 128;
  for (Eigen::Index t = 0; t < x.rows(); ++t)
    for (Eigen::Index c = 0; c < x.cols(); c += kBlock) {
      auto block = x.row(t).segment(c, std::min(kBlock, x.cols() - c));
      const double scale = block.lpNorm<Eigen::Infinity>() / 448;
      if (scale > 0)
        block = block.unaryExpr([&](double v) { return rounded_to_e4m3(v / scale) * scale; });
    }
  return x;
}

Matrix softmax(Matrix x) {  // of each row
  x = (x.colwise() - x.rowwise().maxCoeff()).array().exp();
  return x.rowwise().sum().cwiseInverse().asDiagonal() * x;
}

// The angles' frequencies and the factors of scores and of rotated numbers, with YaRN if asked for.
struct Rope {
  explicit Rope(const ModelConfig& c) : scale(1 / std::sqrt(c.mla.qk_dim())) {
    const RopeConfig& r = c.rope;
    const int dim = c.mla.rope_dim;
    const Eigen::ArrayXd i = Eigen::ArrayXd::LinSpaced(dim / 2, 0, dim / 2 - 1);
    frequencies = pow(r.theta, -2 * i / dim);
    if (!r.yarn) return;
    const auto ms = [](double f, double m) { return f <= 1 ? 1 : 0.1 * m * std::log(f) + 1; };
    const auto cdim = [&](double beta) {
      return dim * std::log(r.original_context / (2 * M_PI * beta)) / (2 * std::log(r.theta));
    };
    const double low = std::max(std::floor(cdim(r.beta_fast)), 0.0);
    double high = std::min(std::ceil(cdim(r.beta_slow)), double(dim - 1));
    if (low == high) high += 0.001;
    const Eigen::ArrayXd ramp = ((i - low) / (high - low)).max(0).min(1);
    frequencies *= ramp / r.factor + (1 - ramp);
    amplitude = ms(r.factor, 1);
    if (r.mscale_all_dim == 0) return;
    const double all = ms(r.factor, r.mscale_all_dim);
    scale *= all * all;
    if (r.mscale != 0) amplitude = ms(r.factor, r.mscale) / all;
  }
  Matrix rotated(Matrix x) const {  // row t is that of token t
    for (Eigen::Index t = 0; t < x.rows(); ++t)
      for (Eigen::Index i = 0; i < frequencies.size(); ++i) {
        auto pair = x.row(t).segment<2>(2 * i);
        const Eigen::Rotation2Dd rotation(static_cast<double>(t) * frequencies[i]);
        pair = amplitude * (rotation * Eigen::Vector2d(pair.transpose())).transpose();
      }
    return x;
  }

  Eigen::ArrayXd frequencies;
  double scale, amplitude = 1;
};

// Matrices have a row for each token.
struct Model {
  const ModelConfig& c;
  const bool fp8_activations;
  const Rope rope{c};

  Matrix logits(const ModelWeights& w, const std::vector<int32_t>& tokens) const {
    Matrix x(tokens.size(), c.dim);
    for (size_t t = 0; t < tokens.size(); ++t) x.row(t) = decoded(w.embed.rows_from(tokens[t], 1));
    for (int l = 0; l < c.n_layers; ++l) {
      const LayerWeights& layer = w.layers[l];
      x += attention(layer.attn, norm(x, layer.attn_norm, c.norm_eps));
      const Matrix h = norm(x, layer.ffn_norm, c.norm_eps);
      x += c.is_moe(l) ? mixture(layer, h) : ffn(layer.ffn, h);
    }
    return mul(w.head, norm(x, w.final_norm, c.norm_eps));
  }

  Matrix linear(const QuantView& w, const Matrix& x) const {
    return mul(w, fp8_activations && w.q.dtype == DType::kF8E4M3 ? rounded_to_e4m3(x) : x);
  }

  Matrix ffn(const FfnWeights& w, const Matrix& x) const {
    const Eigen::ArrayXXd gate = linear(w.gate, x), up = linear(w.up, x);
    return linear(w.down, gate * up / (1 + (-gate).exp()));
  }

  // Keys and values of every head in full; token t attends to tokens 0..t.
  Matrix attention(const AttentionWeights& w, const Matrix& h) const {
    const MlaConfig& m = c.mla;
    const Matrix q = m.q_rank ? linear(w.q_b, norm(linear(w.q_a, h), w.q_a_norm, c.latent_norm_eps))
                              : linear(w.q, h);
    const Matrix a = linear(w.kv_a, h);
    const Matrix kv = mul(w.kv_b, norm(a.leftCols(m.kv_rank), w.kv_a_norm, c.latent_norm_eps));
    const Matrix k_rope = rope.rotated(a.rightCols(m.rope_dim));
    Matrix out(h.rows(), m.n_heads * m.v_dim);
    for (int head = 0; head < m.n_heads; ++head) {
      const Matrix q_head = q.middleCols(head * m.qk_dim(), m.qk_dim());
      const int kv_dim = m.nope_dim + m.v_dim;
      const Matrix kv_head = kv.middleCols(head * kv_dim, kv_dim);
      Matrix scores = q_head.leftCols(m.nope_dim) * kv_head.leftCols(m.nope_dim).transpose() +
                      rope.rotated(q_head.rightCols(m.rope_dim)) * k_rope.transpose();
      scores.triangularView<Eigen::StrictlyUpper>().setConstant(
          -std::numeric_limits<double>::infinity());
      out.middleCols(head * m.v_dim, m.v_dim) =
          softmax(rope.scale * scores) * kv_head.rightCols(m.v_dim);
    }
    return linear(w.o, out);
  }

  Matrix mixture(const LayerWeights& w, const Matrix& h) const {
    Matrix y = c.n_shared_experts > 0 ? ffn(w.ffn, h) : Matrix::Zero(h.rows(), c.dim);
    for (Eigen::Index t = 0; t < h.rows(); ++t)
      for (const auto& [e, weight] : chosen_experts(w, h.row(t)))
        y.row(t) += weight * ffn(w.experts[e], h.row(t));
    return y;
  }

  // The grouped sigmoid router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2; Gate in
  // inference/model.py) or the softmax router of DeepSeek-V2 (arXiv 2405.04434, section 2.2;
  // MoEGate in modeling_deepseek.py).
  std::vector<std::pair<int, double>> chosen_experts(const LayerWeights& w, const Row& h) const {
    const RouterConfig& r = c.router;
    const Row logits = mul(w.router, h);
    const Row s = r.scoring == Scoring::kSigmoid ? Row((1 + (-logits.array()).exp()).inverse())
                                                 : Row(softmax(logits));
    const Row choice = r.has_bias() ? Row(s + decoded(w.router_bias)) : s;

    const int size = r.n_experts / r.n_groups;
    const auto best = [](std::vector<int> of,
                         const auto& score) {  // the lower index first if equal
      std::stable_sort(of.begin(), of.end(), [&](int a, int b) { return score(a) > score(b); });
      return of;
    };
    std::vector<int> groups(r.n_groups);
    std::iota(groups.begin(), groups.end(), 0);
    groups = best(groups, [&](int g) {
      Row members = choice.segment(g * size, size);
      std::sort(members.begin(), members.end(), std::greater<>());
      const bool two = r.method == TopkMethod::kNoauxTc && size > 1;
      return members[0] + (two ? members[1] : 0);
    });
    if (r.method != TopkMethod::kGreedy) groups.resize(r.n_active_groups);
    std::vector<int> experts;
    for (int e = 0; e < r.n_experts; ++e)
      if (std::count(groups.begin(), groups.end(), e / size)) experts.push_back(e);
    experts = best(experts, [&](int e) { return choice[e]; });
    experts.resize(r.n_active);

    Row weights = s(Eigen::all, experts);
    const bool renormalised = r.normalize && r.n_active > 1;
    if (renormalised) weights /= weights.sum() + 1e-20;
    if (!renormalised || c.architecture != "DeepseekV2ForCausalLM") weights *= r.scale;
    std::vector<std::pair<int, double>> chosen;
    for (int k = 0; k < r.n_active; ++k) chosen.emplace_back(experts[k], weights[k]);
    return chosen;
  }
};

Vec vec_of(const Row& row) { return {row.begin(), row.end()}; }
Row row_of(const Vec& x) { return Eigen::Map<const Row>(x.data(), std::ssize(x)); }

}  // namespace

Vec mul(const QuantView& w, const Vec& x) { return vec_of(mul(w, Matrix(row_of(x)))); }

Vec rounded_to_e4m3(const Vec& x) { return vec_of(rounded_to_e4m3(Matrix(row_of(x)))); }

std::vector<Vec> naive_logits(const ModelConfig& config, const ModelWeights& weights,
                              const std::vector<int32_t>& tokens, bool fp8_activations) {
  const Matrix all = Model{config, fp8_activations}.logits(weights, tokens);
  std::vector<Vec> logits;
  for (const auto& row : all.rowwise()) logits.push_back(vec_of(row));
  return logits;
}

}  // namespace tandem::test
