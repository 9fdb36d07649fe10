//! Draws random delays from a seed, so that a failure can be repeated.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::settings::Setting;

/// Returns the next delay, from zero to the setting.
pub(crate) fn next() -> Duration {
    draw(Setting::JitterMicros)
}

/// Returns the next delay of a copy to or from another device's memory.
pub(crate) fn next_of_peers() -> Duration {
    draw(Setting::PeerJitterMicros)
}

fn draw(setting: Setting) -> Duration {
    static DRAWN: AtomicU64 = AtomicU64::new(0);
    let most = setting.value();
    if most == 0 {
        return Duration::ZERO;
    }
    let draw = DRAWN.fetch_add(1, Ordering::Relaxed);
    Duration::from_micros(mix(Setting::Seed.value() ^ draw.rotate_left(32)) % (most + 1))
}

/// Random numbers from the seed and from what tells their user from others.
#[derive(Debug)]
pub(super) struct Draws(u64);

impl Draws {
    pub(super) fn new(user: u64) -> Self {
        Self(mix(Setting::Seed.value() ^ user.rotate_left(32)))
    }

    /// Returns a number less than `bound`, which is not 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % bound
    }
}

/// Mixes the bits of a word: the finalizer of SplitMix64.
fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
