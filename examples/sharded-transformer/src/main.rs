//! Runs a transformer whose weights are divided over the ranks, and compares its output with that of the whole model.
//!
//! Under a launcher, every process is a rank, on host memory. Without one, two ranks are threads of this process.

use std::error::Error;

use candle_core::{D, Device, Tensor};
use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::{Backend, Group, OpenOptions, host};

use model::{LAYERS, Layer, WEIGHTS, weights};

mod model;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> Outcome {
    match Environment::from_env()? {
        Some(_) => compare(OpenOptions::default().backend(Backend::Host).from_env()?),
        None => run_threads(2),
    }
}

fn run_threads(ranks: usize) -> Outcome {
    let ended = in_process::run(ranks, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        Ok(compare(Group::open(bootstrap, fabric)?).map_err(|error| error.to_string()))
    });
    for outcome in ended? {
        outcome?;
    }
    Ok(())
}

/// Compares the output of the sharded model with that of the whole one.
fn compare(mut group: Group) -> Outcome {
    let tokens = model::embeddings()?;
    let whole = (0..LAYERS)
        .try_fold(tokens.clone(), |tokens, layer| Layer::new(&weights(layer))?.forward(&tokens))?;
    let sharded = forward(&mut group, tokens)?;
    let differs = whole.ne(&sharded)?.sum_all()?.to_scalar::<u8>()?;
    assert_eq!(differs, 0, "both models compute the same bits");
    if group.rank().0 == 0 {
        let norm = sharded.sqr()?.mean(D::Minus1)?.mean_all()?.to_scalar::<f32>()?;
        println!("{LAYERS} layers on {} ranks, mean square of the output {norm}", group.ranks());
    }
    Ok(group.close()?)
}

/// Runs all layers. Each rank keeps one shard of the weights of every layer, and the whole weights of at most two layers.
fn forward(group: &mut Group, mut tokens: Tensor) -> Outcome<Tensor> {
    let (rank, ranks) = (group.rank().index(), group.ranks());
    let shard = WEIGHTS.div_ceil(ranks);
    // Two operations, so that one gathers while the weights of the other are in use.
    let mut gathers = [(); 2].map(|()| group.all_gather::<f32>(shard).outputs(1).prepare());
    let [Ok(even), Ok(odd)] = &mut gathers else { return Err("prepare".into()) };
    let shards: Vec<Vec<f32>> = (0..LAYERS)
        .map(|layer| {
            let mut weights = weights(layer);
            weights.resize(shard * ranks, 0.0);
            weights[rank * shard..][..shard].to_vec()
        })
        .collect();
    even.input_mut()?.copy_from_slice(&shards[0]);
    even.run()?;
    let (mut current, mut next) = (even, odd);
    for layer in 0..LAYERS {
        let ahead = match shards.get(layer + 1) {
            Some(shard) => {
                next.input_mut()?.copy_from_slice(shard);
                Some(next.start()?)
            }
            None => None,
        };
        tokens = Layer::new(&current.output()?[..WEIGHTS])?.forward(&tokens)?;
        if let Some(started) = ahead {
            started.wait()?;
        }
        (current, next) = (next, current);
    }
    Ok(tokens.to_device(&Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn sharded_and_whole_models_agree() {
        for ranks in 1..=5 {
            super::run_threads(ranks).unwrap();
        }
    }
}
