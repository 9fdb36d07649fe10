//! Copying bytes, through the cache or past it.
//!
//! A large copy with ordinary stores reads every line of the destination before it overwrites it,
//! and pushes everything else out of the cache. Streaming stores do neither.

/// From this size streaming stores were faster on the machines tried: docs/perf/host-copy.md.
pub(super) const STREAMING_BYTES_MIN: u64 = 2 << 20;

/// Copies `bytes` with streaming stores where the processor has them.
///
/// # Safety
/// `src` is readable and `dst` writable for `bytes`, they do not overlap, and nobody else touches
/// `dst` or writes `src` meanwhile.
pub(super) unsafe fn stream(dst: *mut u8, src: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise, and AVX was just detected.
        return unsafe { x86::stream(dst, src, bytes) };
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};

    const LINE_BYTES: usize = 64;
    const VECTOR_BYTES: usize = size_of::<__m256i>();

    /// # Safety
    /// As [`super::stream`]; the processor has AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn stream(dst: *mut u8, src: *const u8, bytes: usize) {
        let head = dst.align_offset(LINE_BYTES).min(bytes);
        let body = (bytes - head) / LINE_BYTES * LINE_BYTES;
        // SAFETY: `head <= bytes`, within the caller's spans.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, head) };
        for line in (head..head + body).step_by(LINE_BYTES) {
            // SAFETY: the line ends at most at `head + body <= bytes`; `dst + head` is aligned to a
            // line.
            unsafe { stream_line(dst.wrapping_add(line), src.wrapping_add(line)) };
        }
        // Streaming stores are weakly ordered; the flag that follows must not overtake them.
        // SAFETY: a fence touches no memory, register or flag. The intrinsic is unsafe up to Rust 1.88
        // and safe from 1.89 on, so neither form of calling it is right for both.
        unsafe { std::arch::asm!("sfence", options(nostack, preserves_flags)) };
        let done = head + body;
        let (dst, src) = (dst.wrapping_add(done), src.wrapping_add(done));
        // SAFETY: the tail ends at `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes - done) };
    }

    /// # Safety
    /// `src` is readable and `dst` writable for a line, and `dst` is aligned to one.
    #[target_feature(enable = "avx")]
    #[inline]
    unsafe fn stream_line(dst: *mut u8, src: *const u8) {
        for vector in (0..LINE_BYTES).step_by(VECTOR_BYTES) {
            let (dst, src) = (dst.wrapping_add(vector).cast(), src.wrapping_add(vector).cast());
            // SAFETY: inside the line that the caller promised.
            let value = unsafe { _mm256_loadu_si256(src) };
            // SAFETY: as above, and aligned since lines and vectors are powers of two.
            unsafe { _mm256_stream_si256(dst, value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_copies_exactly_its_bytes_at_any_alignment() {
        let src: Vec<u8> = (0..1000_u32).map(|i| (i * 7 + 3) as u8).collect();
        for bytes in [0, 1, 31, 32, 63, 64, 65, 127, 128, 129, 500, 511] {
            for (to, from) in [(0, 0), (1, 0), (0, 1), (63, 17), (33, 64)] {
                let mut dst = vec![0xA5_u8; 1000];
                let (target, source) =
                    (dst.as_mut_ptr().wrapping_add(to), src.as_ptr().wrapping_add(from));
                // SAFETY: both spans lie inside their vectors, which nobody else touches.
                unsafe { stream(target, source, bytes) };
                assert_eq!(dst[to..to + bytes], src[from..from + bytes], "{bytes} {to} {from}");
                assert!(dst[..to].iter().all(|&byte| byte == 0xA5), "{bytes} {to} {from}");
                assert!(dst[to + bytes..].iter().all(|&byte| byte == 0xA5), "{bytes} {to} {from}");
            }
        }
    }
}
