//! Moves the blocks of a paged key-value cache from the rank that computed them to the rank that decodes.
//!
//! The decoding rank says into which of its blocks they go; that many copies are one call.
//! `cargo run -p peerlane-collectives --example kv_blocks`; both ranks are threads of this process.

use std::time::Duration;

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::group::{CopyRange, Group};
use peerlane_hal::Rank;
use peerlane_host as host;

/// Elements of a block: 16 tokens of a head with 128 elements.
const BLOCK_LEN: usize = 16 * 128;
const BLOCKS: usize = 64;
const CACHE_LEN: usize = BLOCKS * BLOCK_LEN;
/// The blocks of a request on the rank that computes, and where the other rank has room for them.
const COMPUTED: [usize; 5] = [3, 4, 5, 20, 9];
const ROOM: [usize; 5] = [40, 41, 42, 7, 0];
const SOON: Duration = Duration::from_secs(5);

fn main() {
    in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        // Behind the cache is the table in which a peer names its free blocks.
        let window = group.window::<i32>(CACHE_LEN + BLOCKS)?;
        let mut channel = group.channel(&window, 1)?;
        let peer = Rank(1 - group.rank().0);
        if group.rank() == Rank(0) {
            for block in COMPUTED {
                channel.write(block * BLOCK_LEN, &[block as i32; BLOCK_LEN])?;
            }
            channel.wait(peer, 0, SOON)?;
            let mut room = [0; COMPUTED.len()];
            channel.read(CACHE_LEN, &mut room)?;
            let copy = |(from, to): (usize, i32)| CopyRange {
                from: from * BLOCK_LEN,
                to: to as usize * BLOCK_LEN,
                len: BLOCK_LEN,
            };
            // Blocks 3 to 5 become one copy, because they touch on both sides.
            let copies: Vec<_> = COMPUTED.into_iter().zip(room).map(copy).collect();
            channel.puts(peer, &copies)?;
            channel.signal(peer, 0)?;
        } else {
            channel.write(CACHE_LEN, &ROOM.map(|block| block as i32))?;
            channel.put_signal(peer, CACHE_LEN..CACHE_LEN + ROOM.len(), CACHE_LEN, 0)?;
            channel.wait(peer, 0, SOON)?;
            let mut block = vec![0; BLOCK_LEN];
            for (computed, room) in COMPUTED.into_iter().zip(ROOM) {
                channel.read(room * BLOCK_LEN, &mut block)?;
                assert!(block.iter().all(|element| *element == computed as i32));
            }
        }
        group.barrier()?;
        drop((channel, window));
        group.close()
    })
    .expect("both ranks succeed");
    println!("{} blocks were moved", COMPUTED.len());
}
