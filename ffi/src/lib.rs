//! C ABI of kvrail.
