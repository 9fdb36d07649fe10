//! The layers of a small transformer, with random weights.

use candle_core::{D, Device, Result, Tensor};
use candle_nn::ops::softmax;

pub const LAYERS: usize = 6;
const TOKENS: usize = 24;
const WIDTH: usize = 64;
const HIDDEN: usize = 4 * WIDTH;

/// The shapes of the weights of a layer, in the order in which they are flattened.
const SHAPES: [(usize, usize); 6] = [
    (WIDTH, WIDTH),
    (WIDTH, WIDTH),
    (WIDTH, WIDTH),
    (WIDTH, WIDTH),
    (WIDTH, HIDDEN),
    (HIDDEN, WIDTH),
];
/// The number of weights of a layer.
pub const WEIGHTS: usize = 4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN;

/// Returns the weights of a layer; a trained model would read them from a file.
pub fn weights(layer: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(layer as u64);
    (0..WEIGHTS).map(|_| (random.f32() - 0.5) / 4.0).collect()
}

pub fn embeddings() -> Result<Tensor> {
    let mut random = fastrand::Rng::with_seed(1000);
    let values: Vec<f32> = (0..TOKENS * WIDTH).map(|_| random.f32() - 0.5).collect();
    Tensor::from_vec(values, (TOKENS, WIDTH), &Device::Cpu)
}

/// A layer with causal attention and a perceptron.
pub struct Layer {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Layer {
    pub fn new(weights: &[f32]) -> Result<Self> {
        let mut rest = weights;
        let mut next = |(rows, columns): (usize, usize)| {
            let (values, behind) = rest.split_at(rows * columns);
            rest = behind;
            Tensor::from_slice(values, (rows, columns), &Device::Cpu)
        };
        let [query, key, value, output, up, down] = SHAPES;
        Ok(Self {
            query: next(query)?,
            key: next(key)?,
            value: next(value)?,
            output: next(output)?,
            up: next(up)?,
            down: next(down)?,
        })
    }

    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let normal = normalised(tokens)?;
        let (query, key) = (normal.matmul(&self.query)?, normal.matmul(&self.key)?);
        let scores = (query.matmul(&key.t()?)? / (WIDTH as f64).sqrt())?;
        let attention = softmax(&scores.broadcast_add(&mask()?)?, D::Minus1)?;
        let attended = attention.matmul(&normal.matmul(&self.value)?)?.matmul(&self.output)?;
        let tokens = (tokens + attended)?;
        let hidden = normalised(&tokens)?.matmul(&self.up)?.gelu()?;
        tokens + hidden.matmul(&self.down)?
    }
}

/// Scales each token to a mean square of one.
fn normalised(tokens: &Tensor) -> Result<Tensor> {
    let scale = (tokens.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
    tokens.broadcast_div(&scale)
}

/// Returns what keeps a token from attending to later ones.
fn mask() -> Result<Tensor> {
    let hides = |at: usize| if at % TOKENS > at / TOKENS { f32::NEG_INFINITY } else { 0.0 };
    Tensor::from_vec((0..TOKENS * TOKENS).map(hides).collect(), (TOKENS, TOKENS), &Device::Cpu)
}
