//! Encodes and decodes the fixed-width little-endian fields of keys and addresses.
//!
//! Lengths that a peer sends are checked against the bytes that are there before they are used.

/// The error for bytes that end before a field is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("field `{field}` has {left} bytes, expected {expected}")]
pub struct Truncated {
    /// The name of the field that could not be read.
    pub field: &'static str,
    /// The width of the field in bytes.
    pub expected: usize,
    /// The number of bytes that were left to read.
    pub left: usize,
}

/// Encodes fields into a growing byte buffer.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Creates a writer with an empty buffer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends raw bytes without a length prefix.
    #[must_use]
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Appends a 16-bit integer in little-endian order.
    #[must_use]
    pub fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends a 32-bit integer in little-endian order.
    #[must_use]
    pub fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends a 64-bit integer in little-endian order.
    #[must_use]
    pub fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Returns the buffer with all encoded fields.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Decodes fields from a byte slice.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Creates a reader that starts at the first byte of `bytes`.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Reads the next `count` raw bytes.
    ///
    /// # Errors
    /// If fewer are left.
    pub fn bytes(&mut self, field: &'static str, count: usize) -> Result<&'a [u8], Truncated> {
        let Some((taken, rest)) = self.0.split_at_checked(count) else {
            return Err(Truncated { field, expected: count, left: self.0.len() });
        };
        self.0 = rest;
        Ok(taken)
    }

    /// Reads the next `N` bytes as an array.
    ///
    /// # Errors
    /// If fewer are left.
    pub fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], Truncated> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(field, N)?);
        Ok(array)
    }

    /// Reads the next 16-bit integer, which is little-endian.
    ///
    /// # Errors
    /// If fewer are left.
    pub fn u16(&mut self, field: &'static str) -> Result<u16, Truncated> {
        self.array(field).map(u16::from_le_bytes)
    }

    /// Reads the next 32-bit integer, which is little-endian.
    ///
    /// # Errors
    /// If fewer are left.
    pub fn u32(&mut self, field: &'static str) -> Result<u32, Truncated> {
        self.array(field).map(u32::from_le_bytes)
    }

    /// Reads the next 64-bit integer, which is little-endian.
    ///
    /// # Errors
    /// If fewer are left.
    pub fn u64(&mut self, field: &'static str) -> Result<u64, Truncated> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// Returns the bytes that were not read yet.
    pub const fn rest(&self) -> &'a [u8] {
        self.0
    }
}

/// Returns the FNV-1a checksum of bytes, which detects accidental changes but no attacks.
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let bytes = Writer::new().u16(1).u32(2).u64(3).bytes(b"end").finish();
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.u16("a"), Ok(1));
        assert_eq!(reader.u32("b"), Ok(2));
        assert_eq!(reader.u64("c"), Ok(3));
        assert_eq!(reader.rest(), b"end");
    }

    #[test]
    fn a_short_slice_names_the_field() {
        let error = Reader::new(&[0; 3]).u64("generation").unwrap_err();
        assert_eq!(error.to_string(), "field `generation` has 3 bytes, expected 8");
    }
}
