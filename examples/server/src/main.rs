//! Serves batches of different sizes with groups of tensor ranks inside a group of all ranks.
//!
//! Under a launcher, every process is a rank, on host memory. Without one, ranks are threads of this process.

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::{Backend, Error, Group, OpenOptions, Operation, Rank, host};

const RANKS: usize = 4;
/// The ranks that together hold one replica of the model.
const TENSOR: usize = 2;
const REPLICAS: usize = RANKS / TENSOR;
const HIDDEN: usize = 512;
const TOKENS_MAX: usize = 256;
const BATCHES: usize = 200;

fn main() -> Result<(), Error> {
    let served = match Environment::from_env()? {
        Some(_) => serve(OpenOptions::default().backend(Backend::Host).from_env()?)?,
        None => in_process::run(RANKS, |bootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
            serve(Group::open(bootstrap, fabric)?)
        })?[0],
    };
    println!("{BATCHES} batches, {served} tokens");
    Ok(())
}

/// Returns the number of tokens that all replicas have served.
fn serve(mut world: Group) -> Result<u64, Error> {
    let rank = world.rank();
    let replica = rank.index() / TENSOR;
    let mut tensor = world.split(Some(replica as u32), 0)?.expect("every rank has a replica");
    let mut batch = world.broadcast::<u32>(Rank(0), REPLICAS).prepare()?;
    let mut count = world.all_reduce::<u64>(1).prepare()?;
    let part = TOKENS_MAX * HIDDEN / TENSOR;
    let mut activations = tensor.all_gather::<f32>(part).resizable().prepare()?;
    let mut clients = (rank == Rank(0)).then(Clients::new);
    let mut served = 0;
    loop {
        if let Some(clients) = &mut clients {
            batch.input_mut()?.copy_from_slice(&clients.next_batch());
        }
        batch.run()?;
        // Every rank receives the sizes, so all of them agree on the last batch.
        if batch.output()?.iter().all(|tokens| *tokens == 0) {
            break;
        }
        let tokens = batch.output()?[replica] as usize;
        forward(&mut activations, rank.index() % TENSOR, tokens)?;
        let first_of_replica = rank.index().is_multiple_of(TENSOR);
        count.input_mut()?[0] = if first_of_replica { tokens as u64 } else { 0 };
        count.run()?;
        served += count.output()?[0];
    }
    drop((batch, count, activations));
    tensor.close()?;
    world.close()?;
    Ok(served)
}

/// Computes this rank's half of the hidden units of each token, and gathers the other half.
fn forward(activations: &mut Operation<f32>, position: usize, tokens: usize) -> Result<(), Error> {
    let unit = |token: usize, unit: usize| (token * HIDDEN + unit) as f32;
    let half = HIDDEN / TENSOR;
    activations.resize(tokens * half)?;
    for (token, units) in activations.input_mut()?.chunks_mut(half).enumerate() {
        units.iter_mut().enumerate().for_each(|(at, it)| *it = unit(token, position * half + at));
    }
    activations.run()?;
    // The halves are blocks one behind the other, each with all tokens.
    for (position, block) in activations.output()?.chunks((tokens * half).max(1)).enumerate() {
        let last = block.last().copied();
        assert_eq!(last, Some(unit(tokens - 1, (position + 1) * half - 1)));
    }
    Ok(())
}

/// Stands in for the queue of a server.
struct Clients {
    random: fastrand::Rng,
    left: usize,
}

impl Clients {
    fn new() -> Self {
        Self { random: fastrand::Rng::with_seed(7), left: BATCHES }
    }

    /// Returns the number of tokens for each replica; zeros after the last batch.
    fn next_batch(&mut self) -> [u32; REPLICAS] {
        if self.left == 0 {
            return [0; REPLICAS];
        }
        self.left -= 1;
        std::array::from_fn(|_| self.random.u32(0..=TOKENS_MAX as u32).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_count_the_tokens_of_all_batches() {
        let served = in_process::run(RANKS, |bootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
            serve(Group::open(bootstrap, fabric)?)
        });
        let mut clients = Clients::new();
        let batches = (0..BATCHES).map(|_| clients.next_batch());
        let tokens: u64 = batches.flatten().map(u64::from).sum();
        assert_eq!(served.unwrap(), [tokens; RANKS]);
    }
}
