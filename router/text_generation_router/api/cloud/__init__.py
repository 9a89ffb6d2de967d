"""What cloud platforms call: SageMaker, Vertex AI, KServe."""
