//! Gathers from and into an arena of the caller, at places that change with every start, and gives the arena back.
//!
//! `cargo run -p peerlane-collectives --example own_memory`; every rank is a thread of this process.

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::group::{Group, Part};
use peerlane_host as host;

const RANKS: usize = 4;
const ARENA: usize = 1 << 16;
const LEN_MAX: usize = 1000;

fn main() {
    in_process::run(RANKS, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        // The memory of an allocator of the program.
        let mut arena = vec![0.0_f32; ARENA];
        // SAFETY: the arena lives until the window has been released on every rank, and is accessed only through it.
        let buffer = unsafe { group.register(&mut arena) }?;
        let window = group.window_over(buffer)?;
        let gather = group.all_gather(LEN_MAX).input_from(&window, 0).output_into(&window, LEN_MAX);
        let mut gather = gather.resizable().prepare()?;
        let random = &mut fastrand::Rng::with_seed(1);
        for step in 0..100 {
            let len = random.usize(1..=LEN_MAX);
            let input = random.usize(..LEN_MAX);
            let output = random.usize(2 * LEN_MAX..ARENA - RANKS * len);
            window.slice_mut(input..input + len)?.fill((10 * step + group.rank().0) as f32);
            gather.resize(Part::len(len).input(input).output(output))?.run()?;
            for (rank, block) in window.slice(output..output + RANKS * len)?.chunks(len).enumerate()
            {
                let value = (10 * step) as f32 + rank as f32;
                assert!(block.iter().all(|element| *element == value), "step {step}, rank {rank}");
            }
        }
        drop(gather);
        group.release(window)?;
        // From here on the arena belongs to this program alone.
        arena.fill(0.0);
        group.close()
    })
    .expect("all ranks succeed");
    println!("{RANKS} ranks gathered 100 times from and into their own memory");
}
