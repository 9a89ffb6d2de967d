"""Routes of cloud platforms: SageMaker, Vertex AI, KServe."""
