//! Tensor and data parallelism: ranks 2k and 2k + 1 share one copy of a model, and ranks of one parity hold the same part of
//! it. Here the program fills and reads the memory itself, so the command hides GPUs:
//!
//! `CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES= torchrun --no-python --nproc-per-node 4 target/debug/examples/parallelism`

use peerlane::{Error, from_env};

const LEN: usize = 100_000;

pub(crate) fn main() -> Result<(), Error> {
    let mut world = from_env()?;
    let (rank, ranks) = (world.rank().0, world.ranks() as u32);
    let mut tensor = world.split(Some(rank / 2), 0)?.expect("every rank has a color");
    let mut data = world.split(Some(rank % 2), 0)?.expect("every rank has a color");
    let mut activations = tensor.all_gather::<u32>(LEN).prepare()?;
    let mut gradients = data.all_gather::<u32>(LEN).prepare()?;
    activations.input_mut()?.fill(rank);
    gradients.input_mut()?.fill(rank);
    let (one, other) = (activations.start()?, gradients.start()?);
    // Ranks may wait in different orders: waiting for one group also moves the other.
    let (first, second) = if rank.is_multiple_of(3) { (one, other) } else { (other, one) };
    first.wait()?;
    second.wait()?;
    let expect = |output: &[u32], members: &[u32]| {
        assert!(output.chunks(LEN).map(|block| block[LEN - 1]).eq(members.iter().copied()));
    };
    expect(activations.output()?, &(0..ranks).filter(|it| it / 2 == rank / 2).collect::<Vec<_>>());
    expect(gradients.output()?, &(0..ranks).filter(|it| it % 2 == rank % 2).collect::<Vec<_>>());
    drop((activations, gradients));
    tensor.close()?;
    data.close()?;
    world.close()
}
