//! Trains with sharded parameters: each rank holds a part of every layer, and the next layer is
//! gathered while this one computes.
//!
//! `cargo run --bin fsdp`; every rank is a thread of this process.

use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::{Error, Group, GroupOptions, Operation, OwnedStart, Priority, host};

const RANKS: usize = 3;
const LAYERS: usize = 4;
const STEPS: usize = 5;

/// Not a multiple of the number of ranks, so the parts of the ranks differ in length.
const LAYER_LEN: usize = 100_001;

/// All elements of a layer are equal, so that a rank can check a gathered layer by itself.
const FIRST_WEIGHT: f32 = 100.0;

/// The sum over the ranks of what [`gradients`] returns for an element: 1 + 2 + 3.
const GRADIENT_SUM: f32 = 6.0;

fn main() -> Result<(), Error> {
    let steps = in_process::run(RANKS, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;

        // A thread of the group moves the bytes while this one computes. Copy engines of GPUs need
        // no such thread.
        let options = GroupOptions::default().progress_thread(true);
        train(options.open(bootstrap, fabric)?)
    })?;
    println!("{RANKS} ranks trained {LAYERS} layers for {} steps", steps[0]);
    Ok(())
}

fn train(mut group: Group) -> Result<usize, Error> {
    let rank = group.rank().index();
    let lens = lens_of_parts();
    let mut parts = vec![vec![FIRST_WEIGHT; lens[rank]]; LAYERS];

    // Two layers are whole at a time: the one that computes and the one that is gathered.
    let mut free =
        vec![group.all_gather::<f32>(&lens).prepare()?, group.all_gather::<f32>(&lens).prepare()?];

    // Nobody waits for gradients before the end of a step, but for the next layer.
    let reduce = group.reduce_scatter::<f32>(&lens).priority(Priority::Low);
    let mut reduce = reduce.prepare()?;

    for step in 0..STEPS {
        let forward: Vec<usize> = (0..LAYERS).collect();
        for_each_layer(&forward, &parts, &mut free, |layer, weights| {
            check(weights, layer, step);
            Ok(())
        })?;

        let backward: Vec<usize> = (0..LAYERS).rev().collect();
        let mut sums = vec![Vec::new(); LAYERS];
        for_each_layer(&backward, &parts, &mut free, |layer, weights| {
            check(weights, layer, step);
            reduce.input_mut()?.copy_from_slice(&gradients(rank));
            reduce.run()?;
            sums[layer] = reduce.output()?.to_vec();
            Ok(())
        })?;

        for (part, sums) in parts.iter_mut().zip(&sums) {
            part.iter_mut().zip(sums).for_each(|(weight, sum)| *weight -= sum);
        }
    }

    drop((free, reduce));
    group.close()?;
    Ok(STEPS)
}

/// Calls `compute` with the whole weights of one layer after another. While it computes, the next
/// layer is gathered.
fn for_each_layer(
    order: &[usize],
    parts: &[Vec<f32>],
    free: &mut Vec<Operation<f32>>,
    mut compute: impl FnMut(usize, &[f32]) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut next = Some(prefetch(free, &parts[order[0]])?);
    for (index, &layer) in order.iter().enumerate() {
        let gathered = next.take().expect("the layer before has started it").wait()?;
        if let Some(&following) = order.get(index + 1) {
            next = Some(prefetch(free, &parts[following])?);
        }

        compute(layer, gathered.output()?)?;
        free.push(gathered);
    }
    Ok(())
}

/// Starts the gather of a layer, of which this rank holds `part`.
fn prefetch(free: &mut Vec<Operation<f32>>, part: &[f32]) -> Result<OwnedStart<f32>, Error> {
    let mut gather = free.pop().expect("at most two layers are whole at a time");
    gather.input_mut()?.copy_from_slice(part);
    gather.into_started()
}

fn lens_of_parts() -> Vec<usize> {
    let longer = LAYER_LEN % RANKS;
    (0..RANKS).map(|rank| LAYER_LEN / RANKS + usize::from(rank < longer)).collect()
}

fn gradients(rank: usize) -> Vec<f32> {
    vec![rank as f32 + 1.0; LAYER_LEN]
}

fn check(weights: &[f32], layer: usize, step: usize) {
    let expected = FIRST_WEIGHT - step as f32 * GRADIENT_SUM;
    let is_right = weights.iter().all(|weight| *weight == expected);
    assert!(weights.len() == LAYER_LEN && is_right, "layer {layer} in step {step}");
}
